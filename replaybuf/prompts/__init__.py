"""The prompt ledger: every prompt of a dataset is in the dataset, in flight, or finished, also after crashes."""

from replaybuf.prompts.prompt_ledger import LedgerCounts, Prompt, PromptLedger

__all__ = ["LedgerCounts", "Prompt", "PromptLedger"]
