"""The one decoder: `decoder` makes it of `blocks`, as described; `program`: a step as one native call."""
