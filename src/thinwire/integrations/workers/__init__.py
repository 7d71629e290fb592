"""Workers that train on their own between outer steps: `outer`, and the handle it returns.

`fragments` hold the global parameters and exchange how far workers have moved, `meeting` is one exchange and whose
share counts, and `starting` compares what workers start from. Without process groups, `member` is a worker among those
that `swarm` finds, with what `directory` asks a store. One of them takes the `seat` and begins. They agree by
`messages` on whose shares count, as `agreement` says, by the clock of `awake`.
"""
