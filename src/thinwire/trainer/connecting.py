"""`connect`: from what the user gives to a trainer at work."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from weakref import WeakValueDictionary

from torch import nn

from thinwire.checked import Count, Positive, Seconds, Size, Whole, checked
from thinwire.codecs import Codec
from thinwire.memories import Memory
from thinwire.reducer import Reducer
from thinwire.trainer.channel import Channel, Settings
from thinwire.trainer.trainer import Trainer
from thinwire.trainer.uplink import drainable
from thinwire.wire.environment import addresses
from thinwire.wire.keys import Given, said
from thinwire.wire.sockets import check_installed
from thinwire.wire.terms import layouts

_AT_WORK = WeakValueDictionary[int, Memory]()
"""The memories of this process's connected trainers, by id."""


@checked
def connect(
    model: nn.Module,
    recipe: Reducer,
    *,
    address: str | Sequence[str] | None = None,
    ticket: Given = None,
    servers: Count = 1,
    down: Codec | None = None,
    fetch_rows: bool = False,
    in_flight: Size = 0,
    drain: Count | None = None,
    seed: Whole = 0,
    reconnect: Seconds = 0.0,
    log_bytes: Count = 1 << 28,
    timeout: Positive = 30.0,
) -> Trainer:
    """Join the parameter servers, load their parameters, and return the trainer.

    Args:
        model: The same as the servers'. Its parameters become views of flat vectors; use neither DDP nor an optimizer.
        recipe: The same as the servers'.
        address: host:port of each server, in their order; under torchrun trainers find them by themselves.
        ticket: The servers' `Server.ticket`, or a file that holds it: one for all, or one for each. By default
            THINWIRE_TICKET (separated by commas), or what a server on this host has left for this user, or torchrun's.
        servers: The same as the servers'.
        down: The same as the servers'.
        fetch_rows: The same as the servers'. Rows of sparse embeddings are then updated only when `Trainer.fetch` asks
            for them. It keeps 8 bytes a row to know how old each is.
        in_flight: How many updates may be unanswered when `step` returns. 0 waits for the answer to each. Answers that
            come later are taken over within the next `step`.
        drain: At random steps, this many apart on average, send the whole residual uncompressed.
        seed: Draws those steps.
        reconnect: Seconds to keep trying to reach a server that is gone, or not yet started. Updates that it has not
            saved are kept and sent again; each is applied once.
        log_bytes: How many bytes of unsaved updates to keep, per server.
        timeout: Seconds of silence after which a server counts as gone.

    Returns:
        The trainer: call its `step()` in place of an optimizer's. A context manager, which closes it.

    Raises:
        FingerprintError: If recipe, parameters or frozen parameters differ from the servers'.
        ValueError: If the recipe or the model is already in use in this process, if there are no rows to fetch, or for
            a ticket that is none or that others may read.
        ServerError: If a server cannot be reached, does not know the ticket, or none is given or found.
        ImportError: Without pyzmq.
        TypeError: If `drain` is given and the memory cannot be drained.

    Example:
        >>> sgd = partial(torch.optim.SGD, lr=0.1)
        >>> server = tw.serve(nn.Linear(64, 64), tw.recipes.topk(), make_optimizer=sgd, address="localhost:0")
        >>> model = nn.Linear(64, 64)
        >>> with server, tw.connect(model, tw.recipes.topk(), address=server.address) as trainer:
        ...     model(torch.ones(1, 64)).sum().backward()
        ...     trainer.step()
        True
    """
    if drain is not None and not drainable(recipe):
        raise TypeError(
            "drain= sends the residual of error feedback; this recipe's memory keeps something else: leave out drain="
        )
    check_installed()
    each, memories = said(ticket), [memory for memory in recipe.memories() if memory.stateful]
    if any(id(memory) in _AT_WORK for memory in memories):
        raise ValueError(
            "this recipe is in use by another trainer of this process, and their residuals would mix: make a "
            "recipe for each trainer, or use one trainer with threads (Trainer.run)"
        )
    its = layouts(model, recipe, down, servers=servers, fetch_rows=fetch_rows)
    places, who, channels = addresses(address, servers, max(timeout, reconnect)), secrets.token_hex(16), list[Channel]()
    if len(each) not in (1, servers):
        raise ValueError(f"{len(each)} tickets for {servers} servers; expected one, or one for each")
    with ExitStack() as if_one_fails:
        for i, layout in enumerate(its):
            layout.compile()
            settings = Settings(
                places[i], i, each[i % len(each)], trainer=who, timeout=timeout, patience=reconnect, room=log_bytes
            )
            channels.append(Channel(settings, layout, model))
            if_one_fails.callback(channels[-1].close, goodbye=False)
        if_one_fails.pop_all()
    for channel in channels:
        channel.copy.places.claim()
    _AT_WORK.update({id(memory): memory for memory in memories})

    def closed() -> None:
        for channel in channels:
            channel.copy.places.release()
        for memory in memories:
            memory.restore({})  # the residual is lost, and no later trainer sends it
            _AT_WORK.pop(id(memory), None)

    return Trainer(model, recipe, channels, drain=drain, seed=seed, in_flight=in_flight, closed=closed)
