"""The traced program: how its equations are read and bound again, the sizes of its
arrays, its meshes, the policies in force, and the CPU that it is for. All of the plan
sees the equations of JAX through this folder.
"""
