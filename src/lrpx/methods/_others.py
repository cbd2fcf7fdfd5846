"""The recipes of other papers, as methods."""

from __future__ import annotations

from lrpx import recipes
from lrpx.methods._backward import Backward
from lrpx.methods._contract import register

register(Backward("gim", recipes.GIM, label="GIM"))
register(Backward("libragrad", recipes.LIBRAGRAD, label="LibraGrad"))
register(Backward("lrp-ding", recipes.LRP_DING, label="LRP (Ding)"))
register(Backward("lrp-voita", recipes.LRP_VOITA, label="LRP (Voita)"))
register(Backward("lrp-chefer", recipes.LRP_CHEFER, label="LRP (Chefer)"))
