"""What a request may ask for: `SamplingParams` as a user gives it, `Sampling` and `Stopping` as they travel.

`limits` imports nothing, as flags are read fast; nothing is imported here either.
"""
