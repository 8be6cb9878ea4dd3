"""Where an executor's weights come from, and what they give way to.

`forms`        how a configuration and a checkpoint say that weights are held
`images`       which memory they go into: private, an image that this worker fills, one that is there already
`cache_file`   an image as a file, for the next start (`--weight-cache`)
`progress`     how far loading is
`new_weights`  a second model beside the running one, and the exchange of the two (`/update_weights`)

The bytes of an image and its table are `model.weights.image`'s; who may fill one is decided by
`launch.instances.image_keeper`.
"""
