"""OpenAI's Responses API (`/v1/responses`), as a translation around chats: bodies become chats', deltas
become items and events; what is kept for later requests.  Pure.

Answers are written by `rendering/responses.py`, the routes are in `http/routes/responses.py`.
"""
