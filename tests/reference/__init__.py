"""Slow, explicit twins of the relevance rules and of four transformer models.

Nothing here uses automatic differentiation: relevance is handed back layer by layer with the
redistribution formulas of the papers, in float64 numpy. The code is meant to be read next to them:

- Arras 2025, "A close look at decomposition-based XAI methods for transformers", Appendix D
- Achtibat 2024, "AttnLRP", section 3 and Appendix A
- Bach 2015 (LRP), Ali 2022 (CP-LRP: softmax and normalisation held constant)
"""
