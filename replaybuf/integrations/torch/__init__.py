"""torch: batches of leased groups through a DataLoader, one or several ranks, collators for padding and packing.

Needs the extra `torch`: `pip install -e '.[torch]'` in a checkout. `docs/torch.md` begins with an example.
"""

from replaybuf.errors import MissingDriverError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDriverError("this module needs torch, which is not installed: pip install torch") from error

from replaybuf.integrations.torch.dataset import GroupDataset
from replaybuf.integrations.torch.ranks import largest, same_steps, split_steps
from replaybuf.integrations.torch.sequences import Pack, Pad, TokenSequence, group_advantages, sequences
from replaybuf.integrations.torch.train_steps import Step, leased_steps
from replaybuf.rules.balance import balance, micro_batches, packed_rows

__all__ = [
    "GroupDataset",
    "Pack",
    "Pad",
    "Step",
    "TokenSequence",
    "balance",
    "group_advantages",
    "largest",
    "leased_steps",
    "micro_batches",
    "packed_rows",
    "same_steps",
    "sequences",
    "split_steps",
]
