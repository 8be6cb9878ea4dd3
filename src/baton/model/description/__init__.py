"""What a decoder is, in data: `model.Description`, and typed access to the JSON that it is read from.

Imports nothing of Baton but the protocol, and no torch: the launcher reads descriptions in milliseconds.
"""
