"""Every op in plain PyTorch. These run with FFTUNE_DISABLE=1, and tests compare with them. Functions
take the arguments of the custom ops of the same names (fftune.ops)."""
from ._reference.attention import *  # noqa: F401, F403
from ._reference.causal_conv1d import *  # noqa: F401, F403
from ._reference.common import *  # noqa: F401, F403
from ._reference.cross_entropy import *  # noqa: F401, F403
from ._reference.decode import *  # noqa: F401, F403
from ._reference.elementwise import *  # noqa: F401, F403
from ._reference.experts import *  # noqa: F401, F403
from ._reference.ffn import *  # noqa: F401, F403
from ._reference.gated_delta_rule import *  # noqa: F401, F403
from ._reference.head import *  # noqa: F401, F403
from ._reference.indexer import *  # noqa: F401, F403
from ._reference.layer import *  # noqa: F401, F403
from ._reference.linear import *  # noqa: F401, F403
from ._reference.mla import *  # noqa: F401, F403
from ._reference.masked import *  # noqa: F401, F403
from ._reference.ngram_block import *  # noqa: F401, F403
from ._reference.norms import *  # noqa: F401, F403
from ._reference.packed import *  # noqa: F401, F403
from ._reference.qkv import *  # noqa: F401, F403
from ._reference.rope import *  # noqa: F401, F403
from ._reference.ssd import *  # noqa: F401, F403
