//! An operation that a device did not run ends a training.

use std::{env, panic::catch_unwind, process::Command, thread};

use burn::{
    backend::{Autodiff, Flex},
    optim::{AdamWConfig, GradientsParams, Optimizer},
};
use burn_quant_train::{
    QuantTrain,
    optim::{QuantAdamWConfig, QuantOptimizer},
    recipe::FallbackInt8,
};
use quant_train_tests::{
    models::{Classifier, Mlp},
    seed,
    train::samples,
};

type T = QuantTrain<Autodiff<Flex>, FallbackInt8<f32, 16>>;

/// Says which child of [`panics_on_device_threads_end_a_training`] a process is.
const CHILD: &str = "QUANT_TRAIN_TEST_DEVICE_FAILURE";

/// A panic as CubeCL's thread for a device has it when memory has run out: caught there.
fn fail_on(thread: &str) {
    let fails = || drop(catch_unwind(|| panic!("no room for a buffer")));
    let thread = thread::Builder::new().name(thread.into()).spawn(fails);
    thread.expect("a thread").join().expect("a caught panic");
}

/// Trains for a step on either side of a panic, and a record in the end.
fn train<O: Optimizer<Mlp<T>, T>>(mut optimizer: O, thread: &str) {
    let batches = samples::<T, Mlp<T>>(seed(), 2);
    let mut model = Mlp::<T>::new(&Default::default());
    for (step, batch) in batches.iter().enumerate() {
        let gradients = GradientsParams::from_grads(model.loss(batch).backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        println!("step {step} is done");
        if step == 0 {
            fail_on(thread);
        }
    }
    optimizer.to_record();
    println!("the record is done");
}

/// The children train in processes of their own: any test of this one would meet the panic.
#[test]
fn panics_on_device_threads_end_a_training() {
    if let Some(child) = env::var_os(CHILD) {
        let thread = if child == "other" {
            "worker"
        } else {
            "DSD-0-0"
        };
        match child == "wrapper" {
            true => train(
                QuantOptimizer::<_, T>::new(
                    AdamWConfig::new().init::<T, Mlp<T>>(),
                    Default::default(),
                ),
                thread,
            ),
            false => train(QuantAdamWConfig::new().init::<T, Mlp<T>>(), thread),
        }
        return;
    }
    for (child, ends) in [("adamw", true), ("wrapper", true), ("other", false)] {
        let program = env::current_exe().expect("this program");
        let name = "suite::device_failure::panics_on_device_threads_end_a_training";
        let output = Command::new(program)
            .args([name, "--exact", "--nocapture"])
            .env(CHILD, child)
            .output()
            .expect("a process");
        let [said, panics] =
            [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
        let what = format!("{child}: {said}{panics}");
        assert!(said.contains("step 0 is done"), "{what}");
        assert_eq!(output.status.success(), !ends, "{what}");
        assert_eq!(said.contains("the record is done"), !ends, "{what}");
        assert_eq!(said.contains("step 1 is done"), !ends, "{what}");
        // What the device said, and what to do.
        let is_told = panics.contains("a device did not run an operation");
        assert_eq!(is_told, ends, "{what}");
        assert!(panics.contains("no room for a buffer"), "{what}");
    }
}
