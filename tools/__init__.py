"""The commands of the project.

A module without a leading underscore is a command (`interdomain --help` lists them); the others are
shared code. They may import every other package of the project, and no package imports them.
Optional libraries are imported when needed.
"""
