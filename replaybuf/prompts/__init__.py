"""The prompt ledger: every prompt of a dataset is in the dataset, in flight, or finished, also after crashes."""

from replaybuf.prompts.ledger import LedgerCounts, PromptLedger
from replaybuf.prompts.prompt import Prompt

__all__ = ["LedgerCounts", "Prompt", "PromptLedger"]
