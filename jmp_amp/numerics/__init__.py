"""What the numbers do: runs of a program that are measured, and plans made from that.

Both begin with a call that is traced, planned and differentiated (`calls`). `diagnose`
runs it with marks on its equations, finds these again in the gradient (`locate`),
measures them while they run and beside f32 (`measure`), and makes a `Diagnosis` of
that. `tune` runs it with roundings that flags switch, searches, and makes a `Tuning`.
"""
