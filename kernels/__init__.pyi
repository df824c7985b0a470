from jrlhf.kernels.logprob import token_logprobs as token_logprobs
from jrlhf.kernels.logprob import token_sums as token_sums
