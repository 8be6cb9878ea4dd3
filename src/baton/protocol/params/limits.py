"""Limits that are flags' defaults too: the command line reads them, so this file imports nothing."""

MAX_LOGPROBS = 20
"""Log-probabilities of each token that a request may ask for, where `--max-logprobs` says nothing else."""
