"""Checkpoints that are Hugging Face model folders.

    <dir>/step-00000050/
        config.json
        model-0000i-of-0000n.safetensors     weights, fp32, under the family's own names
        model.safetensors.index.json         which file holds which tensor
        optimizer/exp_avg-0000i-of-0000n.safetensors, exp_avg.safetensors.index.json, exp_avg_sq likewise
        pith/state.json                      step, data position, counters, random streams (TrainState)
        pith/routing_bias.safetensors        what the family cannot express, when there is any
        pith/manifest.json                   size and sha256 of every file above, written last

Choices:
- Which tensor lies in which file is a pure function of the model, so the bytes do not depend on the mesh and
  any mesh reads them. File i is written by rank i % world, and opened so that a second writer fails.
- A save copies what it will write before it returns, so the next step may run while a thread writes. The
  thread calls no collective; ranks agree on the main thread, then rank 0 publishes by renaming a folder.
- A folder counts only if its manifest is there and every file matches it. Nothing is repaired or guessed.
- What takes `Ranks` is called by all ranks together and fails on all of them if it fails on one.
"""

from pithtrain.checkpoint.load import OtherModel, check_model, export, import_weights, latest, load
from pithtrain.checkpoint.save import SaveFailed, Saver
from pithtrain.checkpoint.state import ONE_RANK, Ranks, TrainState

__all__ = ["ONE_RANK", "OtherModel", "Ranks", "SaveFailed", "Saver", "TrainState"]
__all__ += ["check_model", "export", "import_weights", "latest", "load"]
