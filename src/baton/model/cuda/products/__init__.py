"""Products with weights: of small integers, of rows in eight bits, of experts, and of a fixed order.

`layout`: how a weight lies on the device; `kernel`: the one kernel that multiplies by it, with `tiles`, which
says how it is launched; `groups`, `int8`, `plain`: what a layer has; `experts`, with `pairs`: mixtures.
"""
