"""What the numbers do: runs of a program that are measured, and plans made from that.

`losses` begins both: a call that is traced, planned and differentiated. `diagnosing`
runs it with marks on its equations (`marks`), finds the sites among those of the
gradient (`frames`), measures them while they run (`measuring`, `statistics`), runs the
plan and the function side by side for errors (`lockstep`, `distances`), and makes a
`Diagnosis` of it; many arrays are read in one pass (`blocks`). `tuner` runs it with
roundings that flags switch (`flagged`), searches (`searching`, `moves`), and makes a
`Tuning`.
"""
