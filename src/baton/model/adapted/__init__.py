"""Decoders that classes of transformers compute, on Baton's KV pool and with Baton's products.

`build` makes the class without memory for weights; `probe` runs it so and sees what it asks of attention, and
whether all else it does is of one token alone; `layers` puts packed products and our memory into its places;
`decoder` is what the executor runs, with the interface of `decoder.decoder.Decoder`.  `steady`: functions
whose results depend on where an element lies.
"""
