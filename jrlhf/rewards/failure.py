"""`Failure`: why a reward function has no score for a sample. Standard library only, for workers."""


class Failure(Exception):
    """A sample has no score. A reward function may raise it, to name the kind that the run counts.

    kind: a short word, the end of the metric `rewards/NAME/failures/KIND`. detail: a sentence for messages and the log.
    """

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"
