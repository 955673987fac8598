//! Checkpoints that are damaged, and those of versions that wrote no checksums.

use std::time::{SystemTime, UNIX_EPOCH};

use super::*;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

#[test]
fn damage_to_any_file_of_a_checkpoint_is_one_clear_line() {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = seed.as_nanos() as u64;
    println!("seed {seed}");
    let mut random = Random(seed);

    let (data, folder) = (corpus(), tempfile::tempdir().unwrap());
    let out = folder.path().join("out");
    let run = ["--recipe", "fallback-int8", "--stop-after", "1"];
    succeeded(&small_run(data.path(), &out, &run));
    let step = out.join("fallback-int8/step-1");
    let mut files = vec![out.join("pretrain.json")];
    files.extend(fs::read_dir(&step).unwrap().map(|it| it.unwrap().path()));
    assert_eq!(files.len(), 5, "{files:?}");
    for file in files {
        let name = path(&file).rsplit('/').next().unwrap().to_owned();
        let refused = |what: &str| {
            println!("{name}: {what}");
            fails(&pretrain(&["--resume", path(&out)]), &name);
        };
        let whole = fs::read(&file).unwrap();
        for _ in 0..2 {
            let (byte, bit) = (random.below(whole.len()), random.below(8));
            let mut damaged = whole.clone();
            damaged[byte] ^= 1 << bit;
            fs::write(&file, damaged).unwrap();
            refused(&format!("bit {bit} of byte {byte} of {}", whole.len()));
        }
        let length = random.below(whole.len());
        fs::write(&file, &whole[..length]).unwrap();
        refused(&format!("{length} of {} bytes", whole.len()));
        fs::remove_file(&file).unwrap();
        refused("removed");
        let fork = folder.path().join("fork");
        let fork = ["--fork", path(&out), "--out", path(&fork)];
        fails(&pretrain(&fork), &name);
        fs::write(&file, &whole).unwrap();
    }

    // Other text than the run began with.
    fs::write(data.path().join("a/0.txt"), "different".repeat(50)).unwrap();
    fails(&pretrain(&["--resume", path(&out)]), "has changed");
}

/// Takes out of a file what versions without checksums, seeds and forks did not write.
pub fn age(file: &Path) {
    let sealed: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let mut content = sealed["content"].clone();
    let fields = content.as_object_mut().unwrap();
    fields.remove("sums");
    let config = match fields.get_mut("config") {
        Some(config) => config.as_object_mut().unwrap(),
        None => fields,
    };
    config.remove("seeds").unwrap();
    config.remove("fork").unwrap();
    config.remove("threshold").unwrap();
    fs::write(file, serde_json::to_string_pretty(&content).unwrap()).unwrap();
}
