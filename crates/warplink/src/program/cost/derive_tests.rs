//! Derived models of untuned machines.

use super::*;
use crate::program::cost::find::shipped;

fn h200() -> DeviceProperties {
    DeviceProperties {
        model: "NVIDIA H200".to_owned(),
        version: String::new(),
        multiprocessors: 132,
        cluster_blocks: 8,
        clock: 1.98e9,
        products: [1.07e15, 6.7e13],
        memory_rate: 4.9e12,
        link_rate: 450e9,
        linked: true,
        shared: false,
        kernel_copies: true,
    }
}

fn derived(device: &DeviceProperties, world: usize) -> HardwareModel {
    HardwareModel::derived(DeviceKind::Cuda, device, &Figures::expected(device), world)
}

/// Device properties predict the measured figures closely enough wherever choices depend on them.
#[test]
fn a_machine_is_known_about_as_well_as_when_it_was_measured() {
    let (guess, measured) = (derived(&h200(), 2), shipped("h200-2").unwrap());
    let close = |what: &str, guess: f64, measured: f64, factor: f64| {
        let ratio = guess / measured;
        assert!(
            (1.0 / factor..=factor).contains(&ratio),
            "{what}: {guess:e}, measured {measured:e}"
        );
    };
    for bytes in [MIB, 16 * MIB, 256 * MIB] {
        let bytes = bytes as f64;
        close(
            "put",
            guess.link.put.seconds(bytes),
            measured.link.put.seconds(bytes),
            1.25,
        );
        for name in ["all_gather", "all_reduce", "reduce_scatter"] {
            let [guess, measured] =
                [&guess, &*measured].map(|model| model.collectives.seconds(name, 2, bytes));
            close(name, guess, measured, 1.6);
        }
    }
    for extent in [1024, 4096, 16384] {
        let [guess, measured] = [&guess, &*measured]
            .map(|model| model.gemm.seconds(DType::BF16, extent, extent, extent));
        close("product", guess, measured, 1.5);
    }
    let (guess, measured) = (guess.lanes(), measured.lanes());
    close("stored", guess.stored, measured.stored, 1.1);
    close("loaded", guess.loaded, measured.loaded, 1.1);
    close(
        "block_stored",
        guess.block_stored,
        measured.block_stored,
        1.1,
    );
}

/// Includes devices that report no properties.
#[test]
fn every_derived_model_is_one() {
    let silent = DeviceProperties {
        clock: 0.0,
        products: [0.0; 2],
        memory_rate: 0.0,
        link_rate: 0.0,
        linked: false,
        multiprocessors: 1,
        ..h200()
    };
    let host = DeviceProperties {
        shared: true,
        ..silent.clone()
    };
    for device in [h200(), silent, host] {
        for world in [1, 2, 3, 8, 16] {
            let model = derived(&device, world);
            let text = model.to_json().unwrap();
            assert_eq!(
                HardwareModel::from_json(&text).unwrap().device,
                model.device
            );
        }
    }
}

#[test]
fn estimates_follow_the_figures() {
    let device = h200();
    let seconds = |figures: &Figures| {
        let model = HardwareModel::derived(DeviceKind::Cuda, &device, figures, 2);
        let bytes = (256 * MIB) as f64;
        [
            model.link.put.seconds(bytes),
            model.gemm.seconds(DType::BF16, 8192, 8192, 8192),
            model.memory.copy.seconds(bytes),
        ]
    };
    let fast = Figures::expected(&device);
    let slow = Figures {
        put: fast.put / 2.0,
        products: fast.products / 2.0,
        memory: fast.memory / 2.0,
        ..fast.clone()
    };
    for (slow, fast) in seconds(&slow).into_iter().zip(seconds(&fast)) {
        assert!((1.9..2.1).contains(&(slow / fast)), "{slow} {fast}");
    }
}
