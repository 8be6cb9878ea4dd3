"""Rules that several processes must apply alike: fair queuing, timeouts, proofs and passes, prefix keys."""
