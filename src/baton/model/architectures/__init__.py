"""The families of models, one file each: how a config.json is read, and how tensors are called.

A file tells a family as data (`description`) and computes nothing.  No torch.
"""
