from jrlhf.kernels.logprob.api import token_logprobs as token_logprobs
from jrlhf.kernels.logprob.api import token_sums as token_sums
