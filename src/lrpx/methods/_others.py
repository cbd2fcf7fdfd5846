"""The recipes of other papers, and of vision transformers, as methods."""

from __future__ import annotations

from lrpx import recipes
from lrpx.methods._backward import Backward
from lrpx.methods._contract import register

register(Backward("gim", recipes.GIM, label="GIM"))
register(Backward("libragrad", recipes.LIBRAGRAD, label="LibraGrad"))
register(Backward("lrp-ding", recipes.LRP_DING, label="LRP (Ding)"))
register(Backward("lrp-voita", recipes.LRP_VOITA, label="LRP (Voita)"))
register(Backward("lrp-chefer", recipes.LRP_CHEFER, label="LRP (Chefer)"))
register(Backward("attnlrp-vit", recipes.ATTNLRP_VIT, label="AttnLRP (ViT)"))
register(Backward("lrp-vit", recipes.LRP_VIT, label="LRP (ViT)"))
