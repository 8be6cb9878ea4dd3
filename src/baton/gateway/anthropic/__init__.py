"""Anthropic's Messages API as a chat: its shapes, and the translation of what is asked.  Pure.

How answers are written is in `rendering/messages.py`.
"""
