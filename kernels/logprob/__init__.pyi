from jrlhf.kernels.logprob.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from jrlhf.kernels.logprob.api import token_logprobs as token_logprobs
from jrlhf.kernels.logprob.api import token_sums as token_sums
from jrlhf.kernels.logprob.common import Terms as Terms
from jrlhf.kernels.logprob.likeliest import top_logprobs as top_logprobs
