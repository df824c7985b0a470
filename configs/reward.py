"""The reward of a run: one number for each completion, a larger one is better."""


def reward(prompts, completions, **columns):
    """Returns the scores. `columns` has the dataset's other columns, a list each, such as `answer`."""
    return [score(text(completion)) for completion in completions]


def score(answer):
    """Replace this: it prefers answers of about twenty words."""
    return max(0.0, 1.0 - abs(len(answer.split()) - 20) / 20)


def text(completion):
    """A completion is a string, or in a conversation a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
