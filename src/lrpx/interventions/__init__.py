"""Interventions: set, scale, shift, bound or patch neurons, heads and directions while the user's own model runs.

>>> import lrpx, torch
>>> explainer = lrpx.Explainer.from_pretrained()
>>> model, ids = explainer.model, torch.tensor([explainer("The doors of the house").ids])
>>> with lrpx.intervene(model, {"model.layers.1.mlp": {3: 0.0, 7: lrpx.Scale(5)}}):
...     changed = model(ids).logits
>>> torch.equal(changed, model(ids).logits)  # nothing is left behind the block
False
"""

from lrpx.interventions._blocks import intervene, record
from lrpx.interventions._changes import Add, Along, Change, Clamp, Patch, Scale, Set

__all__ = ["Add", "Along", "Change", "Clamp", "Patch", "Scale", "Set", "intervene", "record"]
