"""From weights to packs: describe a layer, choose its kernels, pack."""
