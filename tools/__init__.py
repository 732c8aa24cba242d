"""The commands: each module without an underscore is one (`main.py` lists them), the others are shared between some of them.

They may import every other package of the project; none imports them. What needs a library of an extra imports it when it runs.
"""
