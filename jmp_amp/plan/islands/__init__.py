"""Islands: f32 operations between half-precision values, which are computed again in
the backward pass, so that differentiation saves the half-precision values alone.
"""
