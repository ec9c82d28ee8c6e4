"""What is kept for the backward pass, and what that makes again.

It is the least: a minimum cut of the values between what cannot be made again and what
the derivatives need, in bytes of the dtypes of the plan.
"""
