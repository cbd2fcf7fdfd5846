"""Found of explanations: against a ground truth, and what their means are worth."""
