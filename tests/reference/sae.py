"""A sparse autoencoder and the relevance of its features, number by number, in float64."""

from __future__ import annotations

import numpy as np


def encode(x, encoder, encoder_bias, decoder_bias, activation, *, k=None, threshold=None, centred=False):
    """The features ``[F]`` of one vector ``x`` ``[d]``."""
    before = []
    for j in range(encoder.shape[1]):
        total = encoder_bias[j]
        for i in range(len(x)):
            total += (x[i] - (decoder_bias[i] if centred else 0.0)) * encoder[i, j]
        before.append(total)
    if activation == "topk":
        limit = sorted(before)[-k]
        return np.array([max(each, 0.0) if each >= limit else 0.0 for each in before])
    if activation == "jumprelu":
        return np.array([each if each > threshold[j] and each > 0 else 0.0 for j, each in enumerate(before)])
    return np.array([max(each, 0.0) for each in before])


def relevance(x, at_x, features, decoder, decoder_bias):
    """How the relevance ``at_x`` ``[d]`` of ``x`` is split over ``x = Σ_j f_j d_j + b + e``.

    With ``∂_i = R_i / x_i``: ``R_fj = f_j Σ_i d_ji ∂_i``, ``R_b = Σ_i b_i ∂_i``, ``R_e = Σ_i e_i ∂_i``.

    Returns:
        ``[F]``, and the two sums.
    """
    gradient = at_x / x
    rebuilt = decoder_bias.copy()
    for j, each in enumerate(features):
        rebuilt = rebuilt + each * decoder[j]
    of_features = np.array([each * sum(decoder[j] * gradient) for j, each in enumerate(features)])
    return of_features, sum(decoder_bias * gradient), sum((x - rebuilt) * gradient)
