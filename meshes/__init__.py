"""Device meshes, sharding layouts and the transfers between them."""

from jrlhf.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
