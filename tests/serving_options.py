"""The settings of the example server, as its command line gives them."""

from argparse import Namespace


def options(**changes: object) -> Namespace:
    given = {
        "page_size": 16,
        "pages": 200,
        "sliding_pages": 40,
        "state_pages": 60,
        "max_batch": 3,
        "max_num_input_tokens": 64,
        "overlap": False,
        "model": None,
        "sliding_window": None,
        "mamba": False,
        "conversations": 4,
        "turns": 3,
        "max_new_tokens": 7,
        "seed": 0,
        "tokens_per_word": 1,
    }
    return Namespace(**(given | changes))
