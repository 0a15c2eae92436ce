//! Known answers from `make_vectors.py`, on every path.

use block_hash::{Adapter, Algo, Chain, ContentSpan, CpuPath, ExtraInputs, ExtraKeys, Guards, Root, Token};
use serde_json::Value;

#[test]
fn own_vectors_are_equal_on_every_path() {
    let file: Value = serde_json::from_str(include_str!("vectors.json")).unwrap();
    let cases = file["cases"].as_array().unwrap();
    for case in cases {
        for path in CpuPath::available() {
            assert_eq!(hashes(case, path), strings(&case["hashes"]), "{path}: {case}");
        }
    }
    assert_eq!(cases.len(), 3 * (4 * 2 + 2 * 13 + 2));
}

#[test]
fn guards_are_those_of_the_vectors() {
    let file: Value = serde_json::from_str(include_str!("vectors.json")).unwrap();
    let cases: Vec<&Value> = file["cases"].as_array().unwrap().iter().collect();
    let secret: [u8; 32] = std::array::from_fn(|i| 100 + i as u8);
    let with_guards = cases.iter().filter(|case| case["parent"].is_null());
    for case in with_guards.clone() {
        let (algo, root) = (algo(case), root(case));
        let (mut chain, mut guards) = (Chain::new(algo, &root), Guards::new(algo, &root, &secret));
        let (tokens, page_size, extras) = (tokens(case), page_size(case), extras(case));
        chain.extend(&tokens, page_size, &extras);
        guards.extend(&tokens, page_size, &extras);
        let guard = |block| format!("{:032x}", u128::from_be_bytes(guards.guard(&chain, block)));
        let given: Vec<String> = (0..chain.len()).map(guard).collect();
        assert_eq!(given, strings(&case["guards"]), "{case}");
    }
    assert_eq!(with_guards.count(), 3 * (4 * 2 + 2 * 13));
}

#[test]
fn ahash64_gives_the_known_answer_of_max() {
    let tokens: Vec<Token> = (0..256).collect();
    let mut chain = Chain::new(Algo::AHash64, &Root([0; 32]));
    chain.extend(&tokens, 128, &ExtraKeys::default());
    assert_eq!(chain.keys(), [0xc841_0060_5592_b9f1, 0xac94_4944_33b9_fcac]);
}

#[test]
fn a_salt_is_hashed_as_the_sha_standard_says() {
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"; // its first example
    assert_eq!(Root::new(None, Some("abc"), None, 0), Root(digest(abc)));
}

fn hashes(case: &Value, path: CpuPath) -> Vec<String> {
    let chain = match case["parent"].as_str() {
        Some(parent) => Chain::with_parent(algo(case), &root(case), &unhex(parent)).unwrap(),
        None => Chain::new(algo(case), &root(case)),
    };
    let mut chain = chain.on(path);
    chain.extend(&tokens(case), page_size(case), &extras(case));
    (0..chain.len()).map(|block| format!("{:?}", chain.identity(block))).collect()
}

fn algo(case: &Value) -> Algo {
    case["algo"].as_str().unwrap().parse().unwrap()
}

fn root(case: &Value) -> Root {
    let seed = case["seed"].as_str().map(digest);
    let adapter = match &case["adapter"] {
        Value::String(name) => Some(Adapter::Name(name)),
        Value::Number(number) => Some(Adapter::Number(number.as_i64().unwrap())),
        _ => None,
    };
    let generation = case["generation"].as_u64().unwrap_or(0);
    Root::new(seed.as_ref(), case["salt"].as_str(), adapter, generation)
}

fn tokens(case: &Value) -> Vec<Token> {
    list(&case["tokens"], |token| token.as_i64().unwrap() as Token)
}

fn page_size(case: &Value) -> usize {
    case["page_size"].as_u64().unwrap() as usize
}

fn extras(case: &Value) -> ExtraKeys {
    let span = |item: &Value| ContentSpan {
        start: item[0].as_u64().unwrap(),
        length: item[1].as_u64().unwrap(),
        hash: digest(item[2].as_str().unwrap()),
    };
    let pair = |item: &Value| (item[0].as_i64().unwrap(), item[1].as_number().unwrap().as_i128().unwrap());
    ExtraKeys::new(&ExtraInputs {
        mm_items: &list(&case["mm_items"], span),
        prompt_embeds: &list(&case["prompt_embeds"], span),
        extra_ids: &list(&case["extra_ids"], |id| id.as_u64().unwrap()),
        overrides: &list(&case["overrides"], pair),
    })
    .unwrap()
}

fn list<T>(value: &Value, item: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().into_iter().flatten().map(item).collect()
}

fn strings(value: &Value) -> Vec<String> {
    list(value, |text| text.as_str().unwrap().to_owned())
}

fn digest(hex: &str) -> [u8; 32] {
    unhex(hex).try_into().unwrap()
}

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}
