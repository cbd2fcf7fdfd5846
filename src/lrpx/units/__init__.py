"""The units of a model: its latent neurons, heads, queries, keys, values, branches and layers, and where each is read.

They are found by what they do and not by a module's name: the model is run once, on a few tokens, and a tap follows
what its torch functions make.
"""

from lrpx.units._asked import places
from lrpx.units._place import KINDS, Kind, Place, place_in
from lrpx.units._reading import Reading

__all__ = ["KINDS", "Kind", "Place", "Reading", "place_in", "places"]
