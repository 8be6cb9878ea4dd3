"""The invariants: `monitor` knows them all, `books` what the wires said, `watches/` where each is checked;
`oracle` is what every request must be answered, `explain` says who waits for whom.
"""
