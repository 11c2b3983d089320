"""Text becomes token datasets, folders of shards that pithtrain.data reads. Nothing here is needed to train."""

from pithdata.preparation import prepare

__all__ = ["prepare"]
