"""An independent judge: LRP on the ATen calls that a model makes, by the papers' formulas, with no code of LRPx.

:func:`judge` runs a model once, keeps every call that depends on the input (:mod:`.tape`), and goes back over them.
Each value ``x`` of the tape gets ``c`` with ``R = x ⊙ c``, which says the same as ``R`` and stays exact where ``x``
is zero. Per call ``y = f(x…)``:

- linear (LRP-0, Bach et al. 2015): ``c_x = fᵀ c_y``; biases and other constants keep their share;
- element-wise ``y = g(x)`` (identity): ``R_x = R_y``, so ``c_x = c_y · y / x``, and 0 where ``x = 0`` or ``|y / x|`` is
  beyond a bound;
- a product of factors that depend on the input (:mod:`.sharing`): a share to each (AttnLRP, Achtibat et al. 2024, Prop.
  3.2 and 3.3), or all to the signal (Arras et al. 2025, D.4) where one is a gate, and all to what an exponential scales
  (Jafari et al. 2024);
- softmax ``s`` of ``u``: ``c_u = s ⊙ (c_s − Σ s c_s)`` (AttnLRP, Prop. 3.1), or a constant (Ali et al. 2022);
- norms: what divides is a constant (Ali et al. 2022); and so is what the model itself detaches.

The judge takes two things from ``docs/design/engine.md``, for no paper has them: that bound, and what is a
gate, and for how long (:mod:`.gates`).
"""

from __future__ import annotations

from tests.reference.aten.judging import Recipe, Verdict, explain, judge
from tests.reference.aten.tape import JudgeError, Tape, Value, record, wide

__all__ = ["JudgeError", "Recipe", "Tape", "Value", "Verdict", "explain", "judge", "record", "wide"]
