"""What several parties must reckon alike: who comes next, who is silent, who may do what,
which key a prefix has.
"""
