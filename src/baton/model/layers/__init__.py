"""The parts that models are made of, each cut for its tensor-parallel rank."""
