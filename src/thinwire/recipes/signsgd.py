"""Sign SGD with error feedback (Karimireddy et al. 2019): one bit per value."""

from thinwire.codecs import Cast
from thinwire.exchanges import AllGather
from thinwire.formats import Sign
from thinwire.memories import ErrorFeedback
from thinwire.recipes.dense import dense
from thinwire.reducer import Compressed, MinimumSize, Reducer


def signsgd(*, group: int | None = None, minimum_size: int = 1024) -> Reducer:
    """Send every sign, and the mean magnitude of each tensor, or of every `group` values."""
    large = Compressed(memory=ErrorFeedback(), codec=Cast(values=Sign(group=group)), exchange=AllGather())
    return MinimumSize(numel=minimum_size, small=dense(), large=large)
