"""What is computed between products, and products whose rows do not depend on each other."""
