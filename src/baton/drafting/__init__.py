"""Who guesses the next tokens of an answer, so that one step can confirm several of them.

`base.py` is what an executor asks of a drafter.  Drafters know token ids and positions, no model and no
slots' blocks; a wrong draft costs time and never changes an answer.
"""
