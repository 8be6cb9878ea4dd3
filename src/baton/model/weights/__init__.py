"""How a linear layer holds its weight, and multiplies by it: as it is, packed, or in eight bits."""
