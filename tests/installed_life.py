"""The life of a request with an installed package that has only numpy and pydantic (`make dist-check`)."""

import numpy as np

import pagekeeper as pk


def main() -> None:
    params = pk.MHAKVCacheParams(
        dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=16, devices=["cpu"]
    )
    kv = pk.PagedKVCacheManager(params=params, total_num_pages=64, max_batch_size=4, allocate_pools=False)
    prompt = np.arange(40)
    for found in (0, 32):  # two of its blocks are full
        ctx = pk.TextContext(request_id=pk.RequestID(), max_length=100, tokens=pk.TokenBuffer(prompt))
        kv.claim(ctx)
        kv.alloc(ctx)
        tables = kv.runtime_inputs([[ctx]])[0]
        assert tables.cache_lengths.tolist() == [found], tables
        kv.step(ctx, new_tokens=[7])
        kv.release(ctx)
    kv.verify()
    print(f"pagekeeper {pk.__version__} works where it was installed: {pk.__file__}")


if __name__ == "__main__":
    main()
