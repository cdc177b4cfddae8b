//! Random programs as the parser sees them: any statements, whether or not they make sense.

use proptest::prelude::*;
use warplink::program::expr::{Comparison, Operator};
use warplink::program::ir::{
    Argument, ArgumentValue, Arm, AxisSelection, Branch, Collective, Declaration, Each,
    ElementType, ElementwiseOp, Expectation, Loop, Node, NodeKind, Order, Over, Position,
    PostedMatmul, Product, Role, Selection, Sharding, ShareItem, Statement, StatementKind,
    StreamRef, TensorRef, Term, Transfer, TransferRef,
};
use warplink::program::parameters::{Parameter, ParameterKind};
use warplink::program::section::{
    DeviceValue, IntegerStore, Literal, Move, Otherwise, Packing, Place, Receiver, ReduceOperator,
    Scratch, Section, Source, Step, StepKind, Verb, WordRange, WordValue,
};
use warplink::program::{Backend, Condition, Direction, Expr, Protocol, Value};
use warplink::{DType, device::ReduceOp};

pub(crate) fn name() -> impl Strategy<Value = String> {
    "[a-z_][a-zA-Z0-9_]{0,6}".prop_filter("not reserved", |name| {
        warplink::program::text::is_name(name)
    })
}

fn element_type() -> impl Strategy<Value = ElementType> {
    // A parameter named like a type would be read as that type.
    let parameter = name().prop_filter("no type", |name| {
        DType::ALL.iter().all(|dtype| dtype.to_string() != *name)
    });
    prop_oneof![
        prop::sample::select(&DType::ALL[..]).prop_map(ElementType::Fixed),
        parameter.prop_map(ElementType::Parameter),
    ]
}

fn over() -> impl Strategy<Value = Over> {
    (name(), expr(), expr()).prop_map(|(index, from, to)| Over { index, from, to })
}

fn expr() -> impl Strategy<Value = Expr> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(Expr::Number),
        (0..20_i64).prop_map(Expr::Number),
        name().prop_map(Expr::Name),
        prop_oneof![Just("rank"), Just("world"), Just("streams"), Just("epoch")]
            .prop_map(|n| Expr::Name(n.into())),
    ];
    let operator = prop::sample::select(&Operator::ALL[..]);
    leaf.prop_recursive(4, 16, 2, move |inner| {
        prop_oneof![
            inner.clone().prop_map(|a| Expr::Negative(a.into())),
            inner.clone().prop_map(|a| Expr::Log2(a.into())),
            (name(), inner.clone()).prop_map(|(list, index)| Expr::Element(list, index.into())),
            name().prop_map(Expr::Count),
            (operator.clone(), inner.clone(), inner).prop_map(|(op, a, b)| Expr::Binary(
                op,
                a.into(),
                b.into()
            )),
        ]
    })
}

/// An integer that is not an element of a list alone, which reads like a tensor.
fn number() -> impl Strategy<Value = Expr> {
    expr().prop_filter("is no tensor", |value| !matches!(value, Expr::Element(..)))
}

pub(crate) fn parameter() -> impl Strategy<Value = Parameter> {
    let numbers = prop::collection::btree_set(0..9_i64, 1..4);
    let types = prop::collection::hash_set(prop::sample::select(&DType::ALL[..]), 1..4);
    let operators = prop::collection::hash_set(operator(), 1..4);
    let one_of = |values: Vec<Value>| ParameterKind::OneOf(values);
    let kind = prop_oneof![
        Just(ParameterKind::Integer),
        Just(ParameterKind::List),
        numbers.prop_map(move |set| one_of(set.into_iter().map(Value::from).collect())),
        types.prop_map(move |set| one_of(set.into_iter().map(Value::from).collect())),
        operators.prop_map(move |set| one_of(set.into_iter().map(Value::from).collect())),
    ];
    (name(), kind).prop_map(|(name, kind)| Parameter { name, kind })
}

fn condition() -> impl Strategy<Value = Condition> {
    let comparison = prop::sample::select(&Comparison::ALL[..]);
    let leaf = prop_oneof![
        (comparison, expr(), expr()).prop_map(|(c, a, b)| Condition::Compare(c, a, b)),
        name().prop_map(Condition::Given),
    ];
    leaf.prop_recursive(3, 8, 2, |inner| {
        prop_oneof![
            inner.clone().prop_map(|a| Condition::Not(a.into())),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| Condition::And(a.into(), b.into())),
            (inner.clone(), inner).prop_map(|(a, b)| Condition::Or(a.into(), b.into())),
        ]
    })
}

fn tensor() -> impl Strategy<Value = TensorRef> {
    (target(), any::<bool>()).prop_map(|(tensor, transposed)| TensorRef {
        transposed,
        ..tensor
    })
}

/// A selection on several axes: one alone that is not all of its axis is on the leading one.
fn axes() -> impl Strategy<Value = Selection> {
    let axis = prop_oneof![
        Just(AxisSelection::All),
        expr().prop_map(AxisSelection::Index),
        (expr(), expr()).prop_map(|(a, b)| AxisSelection::Range(a, b)),
    ];
    prop_oneof![
        Just(vec![AxisSelection::All]),
        prop::collection::vec(axis, 2..4),
    ]
    .prop_map(Selection::Axes)
}

/// Targets of a write.
fn target() -> impl Strategy<Value = TensorRef> {
    let selection = prop_oneof![
        expr().prop_map(Selection::Index),
        (expr(), expr()).prop_map(|(a, b)| Selection::Range(a, b)),
        axes(),
        (expr(), expr()).prop_map(|(a, b)| Selection::Part(a, b)),
    ];
    (name(), prop::collection::vec(selection, 0..3)).prop_map(|(name, selections)| TensorRef {
        name,
        selections,
        transposed: false,
    })
}

fn product() -> impl Strategy<Value = Product> {
    (tensor(), tensor(), prop::option::of(tensor())).prop_map(|(a, b, bias)| Product { a, b, bias })
}

fn transfer() -> impl Strategy<Value = TransferRef> {
    (name(), prop::collection::vec(expr(), 0..3))
        .prop_map(|(name, indices)| TransferRef { name, indices })
}

fn each<T: Clone + std::fmt::Debug>(
    item: impl Strategy<Value = T>,
) -> impl Strategy<Value = Vec<Each<T>>> {
    let each = (item, prop::option::of(over())).prop_map(|(item, over)| Each { item, over });
    prop::collection::vec(each, 1..4)
}

fn stream() -> impl Strategy<Value = StreamRef> {
    prop_oneof![
        Just(StreamRef::Caller),
        expr().prop_map(StreamRef::Pool),
        expr().prop_map(StreamRef::High),
        name().prop_map(StreamRef::Named),
    ]
}

fn order() -> impl Strategy<Value = Order> {
    prop_oneof![
        Just(Order::RowMajor),
        Just(Order::ColumnMajor),
        condition().prop_map(Order::ColumnMajorIf),
    ]
}

fn declaration() -> impl Strategy<Value = Declaration> {
    let role = prop_oneof![Just(Role::Input), Just(Role::Output), Just(Role::Local)];
    (
        (role, any::<bool>()),
        (name(), prop::option::of(over())),
        element_type(),
        prop::collection::vec(expr(), 1..4),
        0..5_usize,
        (order(), any::<bool>()),
    )
        .prop_map(
            |((role, optional), (name, family), dtype, shape, sharded, (order, zero))| {
                let sharding = match sharded {
                    0 | 1 => Sharding::Whole,
                    2 => Sharding::Loop,
                    axis => Sharding::Ranks(axis % shape.len()),
                };
                Declaration {
                    role,
                    optional: optional && role != Role::Local,
                    name,
                    family,
                    dtype,
                    shape,
                    order,
                    zero: zero && role != Role::Input,
                    sharding,
                }
            },
        )
}

fn operator() -> impl Strategy<Value = ReduceOp> {
    prop_oneof![
        Just(ReduceOp::Sum),
        Just(ReduceOp::Max),
        Just(ReduceOp::Min)
    ]
}

fn place() -> impl Strategy<Value = Place> {
    (target(), prop::option::of(expr())).prop_map(|(tensor, on)| Place { tensor, on })
}

/// A put, a get, a copy or a reduction.
fn movement() -> impl Strategy<Value = Move> {
    let otherwise = || {
        let number = (0..9_u8).prop_filter_map("a number", |it| Literal::new(f64::from(it) / 4.0));
        prop_oneof![
            place().prop_map(Otherwise::Place),
            number.prop_map(Otherwise::Number)
        ]
    };
    let other = || prop::option::of((condition(), otherwise()));
    let source = || (place(), other()).prop_map(|(place, otherwise)| Source { place, otherwise });
    let one = |verb: Verb, target: Place, source: Place| Move {
        verb,
        targets: vec![target.into()],
        sources: vec![Source::from(source).into()],
    };
    let combined = prop_oneof![
        operator().prop_map(ReduceOperator::Fixed),
        name().prop_map(ReduceOperator::Parameter),
    ];
    prop_oneof![
        (place(), target()).prop_map(move |(to, from)| one(Verb::Put, to, from.into())),
        (target(), place()).prop_map(move |(to, from)| one(Verb::Get, to.into(), from)),
        (place(), source()).prop_map(|(target, source)| Move {
            verb: Verb::Copy,
            targets: vec![target.into()],
            sources: vec![source.into()],
        }),
        (each(place()), each(source()), combined).prop_map(|(targets, sources, operator)| Move {
            verb: Verb::Reduce(operator),
            targets,
            sources,
        }),
    ]
}

fn device_value() -> impl Strategy<Value = DeviceValue> {
    let range = || {
        let parts = (any::<bool>(), any::<bool>(), expr(), expr());
        parts.prop_map(|(rows, inside, from, to)| WordRange {
            rows,
            inside,
            from,
            to,
        })
    };
    let gives = prop_oneof![
        expr().prop_map(WordValue::Word),
        range().prop_map(WordValue::Count),
        (expr(), range()).prop_map(|(number, range)| WordValue::Position(number, range)),
    ];
    (name(), place(), gives).prop_map(|(name, place, gives)| DeviceValue { name, place, gives })
}

fn receiver() -> impl Strategy<Value = Receiver> {
    (expr(), prop::option::of(expr())).prop_map(|(rank, lane)| Receiver { rank, lane })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let selected = target().prop_filter("selects", |tensor| !tensor.selections.is_empty());
    let leaf = prop_oneof![
        (name(), number()).prop_map(|(name, value)| NodeKind::LetInteger { name, value }),
        (name(), selected).prop_map(|(name, value)| NodeKind::LetTensor { name, value }),
        movement().prop_map(|it| NodeKind::Do(StepKind::Move(it))),
        device_value().prop_map(|it| NodeKind::Do(StepKind::Value(it))),
        (place(), expr()).prop_map(
            |(target, value)| NodeKind::Do(StepKind::Store(IntegerStore { target, value }))
        ),
        each(receiver()).prop_map(|list| NodeKind::Do(StepKind::Signal(list))),
        each(expr()).prop_map(|list| NodeKind::Do(StepKind::Wait(list))),
        Just(NodeKind::Do(StepKind::Barrier)),
    ]
    .prop_map(Step::from);
    blocks(leaf)
}

fn scratch() -> impl Strategy<Value = Vec<Scratch>> {
    let packing = prop::sample::select(&Packing::ALL[..]);
    let shape = prop::collection::vec(expr(), 1..4);
    let parts = prop::collection::vec((name(), packing, element_type(), shape), 1..4);
    (any::<bool>(), parts).prop_map(|(persists, parts)| {
        let several = parts.len() > 1;
        let packed = !several && parts[0].1.is_packets();
        let one = |(name, packing, dtype, shape)| Scratch {
            name,
            persistent: persists && !packed,
            packing: if several { Packing::Plain } else { packing },
            dtype,
            shape,
        };
        parts.into_iter().map(one).collect()
    })
}

fn section() -> impl Strategy<Value = Section> {
    (name(), expr(), expr(), steps()).prop_map(|(lane, lanes, threads, body)| Section {
        lane,
        lanes,
        threads,
        body,
    })
}

fn collective() -> impl Strategy<Value = Collective<Expr>> {
    prop_oneof![
        Just(Collective::AllGather),
        Just(Collective::AllToAll),
        operator().prop_map(Collective::AllReduce),
        operator().prop_map(Collective::ReduceScatter),
        expr().prop_map(Collective::Broadcast),
        (operator(), expr()).prop_map(|(op, root)| Collective::Reduce(op, root)),
    ]
}

fn blocks<A: Clone + std::fmt::Debug + 'static>(
    leaf: impl Strategy<Value = Node<A>> + 'static,
) -> impl Strategy<Value = Vec<Node<A>>> {
    let one = leaf.prop_recursive(3, 12, 3, move |inner| {
        let body = prop::collection::vec(inner, 0..3);
        prop_oneof![
            (over(), body.clone())
                .prop_map(|(over, body)| NodeKind::For(Loop { over, body }).into()),
            (
                prop::collection::vec((condition(), body.clone()), 1..3),
                body
            )
                .prop_map(|(arms, otherwise)| {
                    let arm = |(condition, body)| Arm {
                        position: Position::default(),
                        condition,
                        body,
                    };
                    let arms = arms.into_iter().map(arm).collect();
                    NodeKind::If(Branch { arms, otherwise }).into()
                }),
        ]
    });
    prop::collection::vec(one, 0..4)
}

fn share() -> impl Strategy<Value = Vec<ShareItem>> {
    let backend = prop_oneof![
        Just(Backend::Direct(Protocol::Get)),
        Just(Backend::Direct(Protocol::Put)),
        Just(Backend::Nccl),
    ];
    let direction = prop_oneof![Just(Direction::Send), Just(Direction::Receive)];
    let leaf = prop_oneof![
        (name(), direction, tensor(), expr(), expr(), backend).prop_map(
            |(name, direction, tensor, peer, tag, backend)| {
                NodeKind::Do(Transfer {
                    name,
                    direction,
                    tensor,
                    peer,
                    tag,
                    backend,
                })
                .into()
            }
        ),
        (name(), expr()).prop_map(|(name, value)| NodeKind::LetInteger { name, value }.into()),
    ];
    blocks(leaf)
}

fn elementwise() -> impl Strategy<Value = StatementKind> {
    let combining = prop_oneof![
        Just((ElementwiseOp::Sum, false)),
        Just((ElementwiseOp::Sum, true)),
        Just((ElementwiseOp::Product, false)),
        Just((ElementwiseOp::Max, false)),
        Just((ElementwiseOp::Min, false)),
    ];
    let combining = (combining, each(tensor()));
    let cast = tensor().prop_map(|source| ((ElementwiseOp::Cast, false), vec![source.into()]));
    (target(), prop_oneof![combining, cast]).prop_map(|(target, ((op, accumulate), sources))| {
        StatementKind::Elementwise {
            op,
            target,
            sources,
            accumulate,
        }
    })
}

fn call() -> impl Strategy<Value = StatementKind> {
    let integer = number().prop_filter("is no name", |value| !matches!(value, Expr::Name(_)));
    let value = prop_oneof![
        integer.prop_map(ArgumentValue::Integer),
        prop::sample::select(&DType::ALL[..]).prop_map(ArgumentValue::ElementType),
        tensor().prop_map(ArgumentValue::Reference),
    ];
    let arguments = prop::collection::btree_map(name(), value, 0..4);
    (name(), arguments).prop_map(|(program, arguments)| {
        let arguments = arguments.into_iter();
        let arguments = arguments.map(|(name, value)| Argument { name, value });
        StatementKind::Call {
            program,
            arguments: arguments.collect(),
        }
    })
}

fn expectation() -> impl Strategy<Value = Expectation> {
    let place =
        || (tensor(), prop::option::of(expr())).prop_map(|(tensor, on)| Place { tensor, on });
    let product = (place(), place()).prop_map(|(a, b)| Term::Product(a, b));
    let term = prop_oneof![place().prop_map(Term::Place), product];
    let operator = prop_oneof![
        Just(ReduceOperator::Fixed(ReduceOp::Sum)),
        Just(ReduceOperator::Fixed(ReduceOp::Average)),
        name().prop_map(ReduceOperator::Parameter),
    ];
    let reduced =
        (operator, each(term.clone())).prop_map(|(operator, terms)| (Some(operator), terms));
    let one = term.prop_map(|term| (None, vec![term.into()]));
    let value = prop_oneof![reduced, one];
    (target(), value, prop::option::of(place())).prop_map(|(target, (operator, terms), plus)| {
        Expectation {
            target,
            operator,
            terms,
            plus,
        }
    })
}

pub(crate) fn statements() -> impl Strategy<Value = Vec<Statement>> {
    let selected = tensor().prop_filter("selects", |tensor| !tensor.selections.is_empty());
    let action = prop_oneof![
        condition().prop_map(StatementKind::Require),
        declaration().prop_map(StatementKind::Declare),
        name().prop_map(StatementKind::Deallocate),
        (target(), tensor()).prop_map(|(target, source)| StatementKind::Copy { target, source }),
        (target(), product(), any::<bool>()).prop_map(|(target, product, accumulate)| {
            StatementKind::Matmul {
                target,
                product,
                accumulate,
            }
        }),
        elementwise(),
        (target(), tensor(), collective(), prop::option::of(name())).prop_map(
            |(target, source, collective, among)| StatementKind::Collective {
                target,
                source,
                collective,
                among,
            }
        ),
        call(),
        expectation().prop_map(StatementKind::Expect),
        device_value().prop_map(StatementKind::Value),
        (name(), tensor()).prop_map(|(tensor, part)| StatementKind::InOut { tensor, part }),
        (name(), each(expr()))
            .prop_map(|(name, elements)| StatementKind::LetList { name, elements }),
        share().prop_map(StatementKind::Share),
        scratch().prop_map(StatementKind::Scratch),
        section().prop_map(StatementKind::Kernel),
        each(transfer()).prop_map(StatementKind::Post),
        (transfer(), product(), prop::option::of(over())).prop_map(|(send, product, over)| {
            StatementKind::PostMatmul(Each {
                item: PostedMatmul { send, product },
                over,
            })
        }),
        each(transfer()).prop_map(StatementKind::Wait),
        name().prop_map(StatementKind::GetStream),
        stream().prop_map(StatementKind::SetStream),
        stream().prop_map(StatementKind::Synchronize),
    ]
    .prop_map(Statement::from);
    let bound = prop_oneof![
        (name(), number()).prop_map(|(name, value)| NodeKind::LetInteger { name, value }),
        (name(), selected).prop_map(|(name, value)| NodeKind::LetTensor { name, value }),
    ]
    .prop_map(Statement::from);
    let forked = blocks(prop_oneof![10 => action, 1 => bound]);
    (prop::option::of(each(stream())), forked).prop_map(|(streams, body)| match streams {
        Some(streams) => vec![StatementKind::Fork { streams, body }.into()],
        None => body,
    })
}
