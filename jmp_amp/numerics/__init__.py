"""What the numbers do: runs of a program that are measured, and plans made from that.

`losses` begins both: a call that is traced, planned and differentiated.
"""
